"""What a machine has, chose and did, as one record: a page for people, and two records compared."""
