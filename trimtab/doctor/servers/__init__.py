"""Which bugs of other servers are known?"""
