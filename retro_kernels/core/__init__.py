"""From a public function to a backend: checks of arguments, the operator, the choice, the compiled extensions."""
