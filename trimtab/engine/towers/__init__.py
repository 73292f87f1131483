"""How do images and audio go through their encoders?"""
