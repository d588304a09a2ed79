"""Short for `python -m prime_hpc.commands.logs`."""

import sys

from prime_hpc.commands.logs import main

if __name__ == "__main__":
    sys.exit(main())
