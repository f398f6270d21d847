"""What runs leave behind, read back: dashboards and tables of one run or many."""
