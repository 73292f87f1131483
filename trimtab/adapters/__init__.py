"""What do the files of an adapter contain, and do they fit a model?"""
