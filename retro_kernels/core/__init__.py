"""The way from a public function to a backend: checks, operator, choice of backend."""
