"""The dashboard: a page in the browser, served to one person by a process of their own."""
