"""``dfw bench --suite qp``: quadratic programs that others collected, read from files."""
