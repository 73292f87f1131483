"""What is a plan, and how is it shown?"""
