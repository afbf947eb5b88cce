"""The store: sessions, their events, and what they used. SQLite is the embedded default, PostgreSQL what Ansible deploys."""
