"""What does each subcommand do?"""
