import unittest

from fields import split


class Tests(unittest.TestCase):
    def test_plain_fields(self):
        self.assertEqual(split("a,b,,c"), ["a", "b", "", "c"])

    def test_quotes_protect_commas(self):
        self.assertEqual(split('"a,b",c'), ["a,b", "c"])

    def test_doubled_quotes(self):
        self.assertEqual(split('"say ""no""",x'), ['say "no"', "x"])


if __name__ == "__main__":
    unittest.main()
