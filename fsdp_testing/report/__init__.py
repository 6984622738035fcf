"""The forms of a result for people and machines: one sheet, printed and written as a page; JUnit; progress; files."""
