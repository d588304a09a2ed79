"""An invented world: pages that no model has read, and questions about them."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

STARTS = ("ba", "ce", "do", "fi", "gu", "ha", "ji", "ka", "lo", "me", "ni", "po", "ra", "su", "ta", "ve", "zo")
MIDDLES = ("dra", "lin", "mor", "nes", "pel", "ri", "sto", "tem", "vi", "zu")
ENDS = {"country": "ia", "city": "burg", "river": "ra", "coin": "o"}


@dataclass(frozen=True)
class Country:
    """Names of a country and of what is in it."""

    name: str
    capital: str
    river: str
    coin: str


class Corpus:
    """The pages by title. Equal seeds give equal worlds."""

    def __init__(self, countries: int, seed: int):
        generator = random.Random(seed)
        names = {kind: _names(generator, countries, end) for kind, end in ENDS.items()}
        self.countries = [Country(*row) for row in zip(*names.values(), strict=True)]
        self.pages = {title: text for country in self.countries for title, text in _pages(country)}
        self._words = {title: Counter(_words(f"{title} {text}")) for title, text in self.pages.items()}

    def search(self, query: str, limit: int) -> list[str]:
        """Titles of the pages with the most words of the query, best first."""
        words = set(_words(query))
        scores = {title: sum(counts[word] > 0 for word in words) for title, counts in self._words.items()}
        best = sorted((title for title, score in scores.items() if score), key=lambda title: (-scores[title], title))
        return best[:limit]

    def questions(self) -> Iterator[tuple[str, str]]:
        """Questions and answers: one page is enough for the first of a country, the others take two."""
        for country in self.countries:
            yield f"What is the capital of {country.name}?", country.capital
            yield f"Which coin is used in {country.capital}?", country.coin
            yield f"Which city is the capital of the country that the {country.river} crosses?", country.capital


def _pages(country: Country) -> Iterator[tuple[str, str]]:
    yield (
        country.name,
        f"{country.name} is a country. Its capital is {country.capital}. Its coin is the {country.coin}.",
    )
    yield country.capital, f"{country.capital} is a city of {country.name} and its capital."
    yield country.river, f"The {country.river} is a river. It crosses {country.name} from north to south."


def _names(generator: random.Random, count: int, end: str) -> list[str]:
    every = [f"{start}{middle}{end}".capitalize() for start in STARTS for middle in MIDDLES]
    return generator.sample(every, count)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
