"""Words to find, and what is said about a guess."""

from collections import Counter

WORDS = """
about above actor acute adapt admit adopt agent alarm album alert alike alive allow alone alter angle angry apart apple
apply arena argue arise array aside asset audio avoid award aware badly baker bases basic beach begin being below bench
birth black blame blind block blood board boost bound brain brand bread break breed brief bring broad brown build buyer
cable carry catch cause chain chair chart chase cheap check chest chief child civil claim class clean clear click clock
close coach coast count court cover craft crash cream crime cross crowd crown curve cycle daily dance delay depth doubt
draft drama dream dress drink drive eager early earth eight elite empty enemy enjoy enter equal error event every exact
exist extra faith false fault fiber field fifth fight final first flash fleet floor fluid focus force frame fresh front
fruit giant given glass globe grace grade grain grand grant grass great green gross group guard guess guide happy heart
heavy hence horse hotel house human ideal image index inner input issue joint judge known label large laser later laugh
layer learn least leave legal level light limit local logic loose lower lucky lunch magic major maker march match maybe
mayor media metal might minor model money month moral motor mount mouse mouth movie music needs never night noise north
novel nurse occur ocean offer often order other ought paint panel paper party peace phase phone photo piece pilot pitch
place plain plane plant plate point pound power press price pride prime print prior prize proof proud prove queen quick
quiet quite radio raise range rapid ratio reach ready refer right rival river rough round route royal rural scale scene
scope score sense serve seven shall shape share sharp sheet shelf shell shift shirt shock shoot short shown sight since
sixth skill sleep slide small smart smile smoke solid solve sorry sound south space spare speak speed spend split sport
staff stage stake stand start state steam steel stick still stock stone store storm story strip study stuff style sugar
suite super sweet table taken taste teach thank theme there thick thing think third those three throw tight timer title
today topic total touch tough tower track trade train treat trend trial trust truth twice under union unity until upper
urban usage usual valid value video visit vital voice waste watch water wheel where which while white whole whose woman
world worry worth would write wrong yield young youth
""".split()


def marks(guess: str, answer: str) -> str:
    """One letter for each of the guess: G in its place, Y elsewhere in the word, X not in it (or not so often)."""
    left = Counter(a for g, a in zip(guess, answer, strict=True) if g != a)
    found = []
    for g, a in zip(guess, answer, strict=True):
        if g == a:
            found.append("G")
        elif left[g]:
            left[g] -= 1
            found.append("Y")
        else:
            found.append("X")
    return "".join(found)
