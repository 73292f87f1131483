"""How are the images and audio of a request fetched and checked?"""
