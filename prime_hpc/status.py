"""Short for `python -m prime_hpc.commands.status`."""

import sys

from prime_hpc.commands.status import main

if __name__ == "__main__":
    sys.exit(main())
