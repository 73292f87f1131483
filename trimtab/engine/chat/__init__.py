"""How do messages become token ids, and answer tokens become text, reasoning and calls?"""
