"""What the demo trains on, and what it checks in the result; ``tools/run_demo.py`` runs it."""
