"""What does an issue for another project say, from recorded runs?"""
