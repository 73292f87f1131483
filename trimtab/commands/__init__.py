"""What each command of the command line does: its flags, one library call, what is printed."""
