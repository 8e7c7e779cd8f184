// A build without libmicrohttpd refuses to serve.
#include "base/refuse.hpp"
#include "serve/http/http.hpp"
#include "serve/http/keys.hpp"

namespace isograd::serve {
namespace {

[[noreturn]] void refuse_to_serve() {
  refuse("isograd serve", "a build of isograd without HTTP",
         "one that was made with libmicrohttpd and GnuTLS",
         "Install libmicrohttpd-dev, and build again with -DISOGRAD_SERVE=ON");
}

}  // namespace

struct HttpServer::Impl {};
HttpServer::HttpServer(HttpOptions, Admit, Handler) { refuse_to_serve(); }
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return 0; }
std::int64_t HttpServer::connections() const { return 0; }
ApiKeys::ApiKeys(const fs::path&) { refuse_to_serve(); }
std::optional<std::string> ApiKeys::tenant_of(std::string_view) const { return std::nullopt; }
NewKey::NewKey(const std::string&) { refuse_to_serve(); }

}  // namespace isograd::serve
