"""SQLite files that survive damage, locks and deletion while servers share them."""
