"""Rules of the game (Kuhn 1950, "A simplified two-person poker"): both ante 1, a bet is 1 more."""

MOVES = {"": ("check", "bet"), "check": ("check", "bet"), "bet": ("call", "fold"), "check bet": ("call", "fold")}
"""Moves that are open after those made so far."""
LOWEST, HIGHEST = 0, 2
FORFEIT = 3


def payoff(cards: tuple[int, int], history: list[str]) -> int:
    """What the first player wins in a finished game; the second loses it."""
    higher = 1 if cards[0] > cards[1] else -1
    if history[-1] == "fold":
        return 1 if len(history) == 2 else -1
    return higher * (2 if history[-1] == "call" else 1)


def forfeit(player: int) -> int:
    """What the first player wins where `player` made a move that is not open: more than any open move can lose."""
    return FORFEIT if player == 1 else -FORFEIT


def blunders(card: int, player: int, history: list[str]) -> dict[str, float]:
    """Of one player: whether a move was not open, and whether an answer to a bet lost for sure (calling with the lowest
    card, folding the highest); answers where the card leaves a choice are not counted.

    What both win is always 0 in sum, so this shows how well they play.
    """
    rates = {}
    for i in range(player, len(history), 2):
        moves = MOVES[" ".join(history[:i])]
        rates["illegal"] = float(history[i] not in moves)
        if "call" in moves and history[i] in moves and card in (LOWEST, HIGHEST):
            rates["blunder"] = float(history[i] == ("call" if card == LOWEST else "fold"))
    return rates
