"""The rewrites passes are made of: each edits one region and says what it matched."""
