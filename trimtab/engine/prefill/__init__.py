"""How do prompts become keys and values?"""
