"""What is a plan made of: blocks, bytes, budgets, execution?"""
