"""Rules of the game (Kuhn 1950, "A simplified two-person poker"): both ante 1, a bet is 1 more."""

MOVES = {"": ("check", "bet"), "check": ("check", "bet"), "bet": ("call", "fold"), "check bet": ("call", "fold")}
"""Moves that are open after those made so far."""


def payoff(cards: tuple[int, int], history: list[str]) -> int:
    """What the first player wins in a finished game; the second loses it."""
    higher = 1 if cards[0] > cards[1] else -1
    if history[-1] == "fold":
        return 1 if len(history) == 2 else -1
    return higher * (2 if history[-1] == "call" else 1)


def forfeit(player: int) -> int:
    """What the first player wins where `player` made a move that is not open: as if a bet had been lost."""
    return 2 if player == 1 else -2
