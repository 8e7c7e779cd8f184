// toml++ compiled once: whoever links an installed isograd needs neither its headers nor its library.
#define TOML_IMPLEMENTATION
#include <toml++/toml.h>
