"""How is a figure drawn as SVG?"""
