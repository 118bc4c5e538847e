//! gRPC's unary calls over HTTP/2 without TLS: all that the generated client needs.

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use prost::Message;
use std::fmt;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Every call of KVTransfer needs a deadline.
const DEADLINE: Duration = Duration::from_secs(5);

/// How a call ended that failed: gRPC's code and message. The reason is in a `google.rpc.ErrorInfo` of the trailer
/// `grpc-status-details-bin`; see docs/routers.md.
pub struct Status(String);

impl fmt::Display for Status {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

fn failed(error: impl fmt::Display) -> Status {
    Status(error.to_string())
}

pub struct Connection {
    authority: String,
    sender: SendRequest<Bytes>,
}

impl Connection {
    /// `host:port`, or `unix:/path`.
    pub async fn open(address: &str) -> Result<Connection, Status> {
        if let Some(path) = address.strip_prefix("unix:") {
            let stream = tokio::net::UnixStream::connect(path).await.map_err(failed)?;
            return Connection::over(stream, "localhost").await;
        }
        Connection::over(tokio::net::TcpStream::connect(address).await.map_err(failed)?, address).await
    }

    async fn over<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(stream: S, authority: &str) -> Result<Self, Status> {
        let (sender, connection) = h2::client::handshake(stream).await.map_err(failed)?;
        tokio::spawn(connection);
        Ok(Connection { authority: authority.into(), sender })
    }

    pub async fn call<Q: Message, A: Message + Default>(&mut self, path: &str, request: &Q) -> Result<A, Status> {
        tokio::time::timeout(DEADLINE, self.unary(path, request)).await.map_err(failed)?
    }

    async fn unary<Q: Message, A: Message + Default>(&mut self, path: &str, request: &Q) -> Result<A, Status> {
        let head = http::Request::post(format!("http://{}{path}", self.authority))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", format!("{}m", DEADLINE.as_millis()))
            .body(())
            .map_err(failed)?;
        let mut body = BytesMut::new();
        body.put_u8(0);
        body.put_u32(request.encoded_len() as u32);
        request.encode(&mut body).map_err(failed)?;
        let mut sender = self.sender.clone().ready().await.map_err(failed)?;
        let (response, mut out) = sender.send_request(head, false).map_err(failed)?;
        out.send_data(body.freeze(), true).map_err(failed)?;

        let (parts, mut incoming) = response.await.map_err(failed)?.into_parts();
        let mut answer = BytesMut::new();
        while let Some(chunk) = incoming.data().await {
            let chunk = chunk.map_err(failed)?;
            incoming.flow_control().release_capacity(chunk.len()).map_err(failed)?;
            answer.extend_from_slice(&chunk);
        }
        // Without an answer the status is among the headers.
        let trailers = incoming.trailers().await.map_err(failed)?.unwrap_or(parts.headers);
        let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("").to_string();
        if text("grpc-status") != "0" {
            return Err(Status(format!("{} [status {}]", text("grpc-message"), text("grpc-status"))));
        }
        if answer.len() < 5 {
            return Err(failed("no answer"));
        }
        A::decode(answer.split_off(5).freeze()).map_err(failed)
    }
}
