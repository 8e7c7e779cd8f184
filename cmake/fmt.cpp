// The run-time part of {fmt}, compiled once: as a library of headers alone it is a third of the code of
// every object file. The headers are those of LibTorch, so no package's compiled library has their
// symbols.
#include <fmt/format-inl.h>

// Templates that fmt/base.h and fmt/format.h declare as instantiated elsewhere.
FMT_BEGIN_NAMESPACE
template FMT_API auto locale_ref::get<std::locale>() const -> std::locale;
namespace detail {
template FMT_API auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;
}  // namespace detail
FMT_END_NAMESPACE
