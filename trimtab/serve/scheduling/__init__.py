"""Whose turn is it?"""
