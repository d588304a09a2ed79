import unittest

from numerals import MOST, roman


class Tests(unittest.TestCase):
    def test_small_numbers(self):
        self.assertEqual([roman(n) for n in (1, 4, 9, 14)], ["I", "IV", "IX", "XIV"])

    def test_large_numbers(self):
        self.assertEqual([roman(n) for n in (440, 994, 1300)], ["CDXL", "CMXCIV", "MCCC"])

    def test_the_largest_number(self):
        self.assertTrue(roman(MOST).startswith("MM"))
        self.assertRaises(ValueError, roman, MOST + 1)


if __name__ == "__main__":
    unittest.main()
