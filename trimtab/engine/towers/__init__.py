"""How do the encoders compute images and audio?"""
