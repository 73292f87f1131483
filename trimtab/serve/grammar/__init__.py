"""How is an answer held to a schema, within bounds?"""
