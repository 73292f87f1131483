"""How is an answer restricted to a schema, within bounds?"""
