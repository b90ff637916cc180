"""`python -m neuromanifold`."""

from neuromanifold.cli import main

main()
