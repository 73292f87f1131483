"""What is a plan, and how do people see it?"""
