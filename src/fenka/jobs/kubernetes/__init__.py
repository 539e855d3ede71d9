"""Services of a cluster: deploys versions, changes and deletes them, divides requests among them."""
