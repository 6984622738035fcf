"""How do users get at full parameters, and what becomes of their edits?"""
