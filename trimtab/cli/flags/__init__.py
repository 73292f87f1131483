"""What do all commands share: flags, wording, output?"""
