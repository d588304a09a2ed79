"""Short for `python -m prime_hpc.commands.plan`."""

import sys

from prime_hpc.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
