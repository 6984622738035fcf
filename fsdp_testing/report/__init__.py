"""What people and machines read of a result: one sheet, printed and written as a page; JUnit; progress; files."""
