"""What share of an adapter's change did a merge keep?"""
