"""`python -m isograd`: the command."""
from _isograd_command import main

main()
