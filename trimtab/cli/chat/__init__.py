"""How does a chat run in a terminal?"""
