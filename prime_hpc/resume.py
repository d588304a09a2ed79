"""Short for `python -m prime_hpc.commands.resume`."""

import sys

from prime_hpc.commands.resume import main

if __name__ == "__main__":
    sys.exit(main())
