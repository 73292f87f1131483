"""What did a merge keep?"""
