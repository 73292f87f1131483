"""What do the files of an adapter say, and do they fit a model?"""
