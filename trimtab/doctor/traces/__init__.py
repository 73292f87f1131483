"""Whose error is this text?"""
