"""Roman numerals."""

MOST = 3999
SIGNS = [("M", 1000), ("CM", 900), ("D", 500), ("CD", 400), ("C", 100), ("XC", 90), ("L", 50), ("XL", 40),
         ("X", 10), ("IX", 9), ("V", 5), ("IV", 4), ("I", 1)]  # fmt: skip


def roman(number):
    """The numeral of a number from 1 to MOST."""
    if not 0 < number <= MOST:
        raise ValueError(number)
    text = ""
    for sign, value in SIGNS:
        while number >= value:
            text += sign
            number -= value
    return text
