"""What does the doctor report?"""
