"""What does a user force: placements, device maps, cards, dtypes?"""
