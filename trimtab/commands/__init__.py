"""The commands: each has its flags, one library call and its output."""
